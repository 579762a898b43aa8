"""Measurement for check, tune and bench: the cases, their inputs, timing and accuracy.

:mod:`.cases` has operators, sizes and passes as values; :mod:`.inputs` draws the tensors;
:mod:`.timing` measures time and memory; :mod:`.judge` compares results with eager PyTorch and
float64.
"""
