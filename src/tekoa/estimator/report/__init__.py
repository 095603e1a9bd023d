"""`tekoa page`: a run as one HTML page."""
