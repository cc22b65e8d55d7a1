"""What serves exported weights on a cluster: the command of our own server and of vLLM."""
