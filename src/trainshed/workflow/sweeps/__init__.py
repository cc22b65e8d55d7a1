"""Many runs of one recipe: which values they have, who starts them, what they come to, and scaling laws from them."""
