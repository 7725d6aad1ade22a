"""What a provider can run, said from tables of kernels and without the provider."""
