"""What tests share: real clusters, runs, models, recipes and servers, all small. `tests/README.md` says which is which."""
