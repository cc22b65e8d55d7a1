"""What a run takes besides its layout: checkpoints, failures, data, host memory, hours, energy and money."""
