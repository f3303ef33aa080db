"""Other systems on the same weights: their environment, their models, one worker process each."""
