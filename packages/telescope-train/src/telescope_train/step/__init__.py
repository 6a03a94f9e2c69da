"""From the rollouts of one step to optimizer steps: credit, filters, minibatches, metrics."""
