"""The averages of past rounds: kept, served, and fetched by those who missed them."""
