"""A request's messages, template, tools and images: what turns them into tokens."""
