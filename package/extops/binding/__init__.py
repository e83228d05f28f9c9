"""Between Python and the compiled libraries: which are loaded and how they are called, their schemas and devices."""
