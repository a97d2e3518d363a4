"""A small streaming recogniser, trained through this library: Morse code by default, real speech where installed.

Letters: B utterances, T frames of the encoder, U labels, U1 = U + 1 states, H joint width, V vocabulary with blank.
"""
