"""One machine: who holds its GPUs, whether it is fit, and how to get memory back."""
