"""What one step makes of its rollouts: credit, filters, minibatches, metrics; in the driver."""
