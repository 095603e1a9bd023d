"""Short programs, one for each page of the cookbook."""
