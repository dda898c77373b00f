"""The paper's theorem on small cases: greedy eviction against the best of all kept sets."""
