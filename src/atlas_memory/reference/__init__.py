"""The papers as printed: a page each, plain PyTorch, one sequence and one head, with the equation numbers at the lines.

The pages are for reading. They import torch alone, and no other part of the package imports them. For every named rule
a test compares its page with ``recurrent`` of ``RULES[name].printed()``: outputs, the last memory and outer gradients
agree to 1e-10 in float64. Letters are those of ATLAS on every page: alpha is the share of the memory that is kept, eta
the step size, theta the decay of the momentum, gamma the gates of the window.
"""
