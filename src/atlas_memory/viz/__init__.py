"""What runs did: a report of one (`atlas report`), a page that compares several, and a dashboard that follows them."""
