"""Copies between GPUs and the pools by DMA, which the daemon is told of."""
