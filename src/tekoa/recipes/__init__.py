"""Short runnable files, one per page of the cookbook."""
