"""Files of any store to blocks of whole documents, and blocks to documents."""
