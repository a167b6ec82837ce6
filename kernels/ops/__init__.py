"""Operations: the interface of each, its torch reference, and the implementations to choose from."""
