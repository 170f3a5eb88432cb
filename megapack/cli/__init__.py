"""megapack-build: commands that parse options, call the library and print the result."""
