"""From a plan to source text: sympy printers, templates, files. The same plan gives the same bytes."""
