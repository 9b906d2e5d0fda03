"""The model zoo: small, trainable reference models. `osdp.zoo` loads them by name."""
