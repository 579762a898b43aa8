"""What check, tune and bench share: what is measured, on which inputs, how it is timed and how it is judged.

:mod:`.cases` has operators, sizes and passes as values; :mod:`.inputs` draws the tensors, :mod:`.timing` takes time and
memory, :mod:`.judge` compares results with eager PyTorch and float64.
"""
