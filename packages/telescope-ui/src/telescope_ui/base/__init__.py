"""What all pages need and no run: parameters of addresses, answers, curves, lanes and bands."""
