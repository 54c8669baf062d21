"""The read path: which replica holds this prompt's KV blocks, and what would each cost?

Pure decisions plus one Redis adapter. No Ray and no HTTP framework.
"""
