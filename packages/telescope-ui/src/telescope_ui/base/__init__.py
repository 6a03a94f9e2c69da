"""Parts that all pages need: parameters of addresses, answers, curves and lanes."""
