"""What several test modules share: tiny models, browsers, servers, invented devices."""
