"""Load on a server: requests that many clients send, and what they wait for."""
