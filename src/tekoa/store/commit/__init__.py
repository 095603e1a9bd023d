"""How a step becomes visible on disk, and how it is removed."""
