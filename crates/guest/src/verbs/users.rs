//! Who still uses an object that only this crate knows of, such as a parent domain: `EBUSY` until nobody does.

use std::sync::Arc;

use crate::ffi::Errno;

/// Counts the users of an object.
#[derive(Debug, Default)]
pub struct Users(Arc<()>);

/// One user, for as long as it lives.
#[derive(Debug)]
pub struct User {
    _of: Arc<()>,
}

impl Users {
    /// One more.
    pub fn add(&self) -> User {
        User { _of: self.0.clone() }
    }

    /// `EBUSY` if there are any.
    pub fn none(&self) -> Result<(), Errno> {
        match Arc::strong_count(&self.0) {
            1 => Ok(()),
            _ => Err(Errno::BUSY),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_object_is_busy_while_it_has_users() {
        let users = Users::default();
        assert_eq!(users.none(), Ok(()));
        let (one, two) = (users.add(), users.add());
        drop(one);
        assert_eq!(users.none(), Err(Errno::BUSY));
        drop(two);
        assert_eq!(users.none(), Ok(()));
    }
}
