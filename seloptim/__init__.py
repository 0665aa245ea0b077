"""Adam in curved weight space (SymExpLin, arXiv:2607.09967), as a drop-in torch optimizer."""
