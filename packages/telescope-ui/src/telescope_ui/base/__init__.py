"""Parts that all pages need: parameters of addresses, answers, curves, lanes and bands."""
