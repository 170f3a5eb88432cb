"""Imported first by a file of tests whose imports need torch: `make test-data` passes over it."""

from peers import peer

peer("torch")
