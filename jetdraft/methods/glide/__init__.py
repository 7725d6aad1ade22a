"""GliDe (2402.02082): a layer that reads the keys and values of the target."""
