"""Oracles for the transducer losses; they share nothing with the package they check."""
