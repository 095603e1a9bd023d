"""Run directories in object stores: a working copy on disk, published as a whole."""
