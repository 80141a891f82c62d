"""A server: requests with the protocol of OpenAI, answered from saved memories, many at a time."""
