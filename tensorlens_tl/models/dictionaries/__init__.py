"""One reading of any sparse dictionary: an autoencoder of a stream, or a transcoder from one place to another.

A dictionary is any object with ``W_enc`` `[d_in, feature]` and ``W_dec`` `[feature, d_out]`, by its own names or
SAELens'. With the active features held (and the scale, where it normalises what it reads), it is affine:

    f_i = ⟨W_enc_i, n(x)⟩ + b_enc_i     for active i, 0 for all others
    x̂   = s · (Σ_i f_i · W_dec_i + b_dec)  (+ the mean that n takes away, + x·W_skip)

The active set is the dictionary's own, whatever chooses it: ReLU, JumpReLU and TopK differ in nothing else. What is
read is compared with the object's own `encode` and `decode`, where it has them, and refused where it differs.
"""

from tensorlens_tl.models.dictionaries.dictionary import DictionaryWeights
from tensorlens_tl.models.dictionaries.reading import read_dictionary

__all__ = ["DictionaryWeights", "read_dictionary"]
