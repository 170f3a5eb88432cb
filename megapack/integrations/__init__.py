"""Other trainers (hosts): one adapter each, which passes packed rows in the host's format."""
