from tekoa.models.rnn_lm import RNNLM as RNNLM
