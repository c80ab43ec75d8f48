"""Copies between GPUs and the pools by DMA, which the client reports to the daemon."""
