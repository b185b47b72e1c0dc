"""The autoregressive model in plain torch: embeddings, decoder layers, code predictor, sampler, weight loading."""
