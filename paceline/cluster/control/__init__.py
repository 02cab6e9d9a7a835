"""What a launcher and its workers tell each other."""
