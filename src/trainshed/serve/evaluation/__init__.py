"""What a model is measured by: perplexity on prepared tokens, tasks of lm-eval, questions with expected words."""
