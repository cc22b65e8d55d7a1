"""Many runs of one recipe: their values, who starts them, their results, and scaling laws from them."""
