"""The data of `fit`: any form that users have, as batches with inputs and targets."""
