"""What is known about Dynamo: its inputs, sources, fake calls and tracing context."""
