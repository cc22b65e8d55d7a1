"""One Store over local disk, S3/MinIO, GCS, Azure, the Hugging Face Hub and HTTP; copies, manifests, commit markers."""
