"""Several loops whose steps differ in numbers only, run by one program."""
