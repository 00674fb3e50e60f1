"""Which tokens a cache keeps, one policy a file: decisions in NumPy over statistics."""
