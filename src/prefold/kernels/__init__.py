"""Native kernels: plain functions over memory, each with a reference in torch. Import nothing of ours."""
