"""The long form of model files, compatible with JEstimator."""
