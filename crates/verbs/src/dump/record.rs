//! A record with its body: what [`super::take`] writes and [`super::restore`] reads.

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::bodies::{AhBody, ChannelBody, CqBody, MrBody, MwBody, QpBody, SrqBody};
use super::{DumpError, ObjectType, format};

/// One object of a dump.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    pub(super) handle: u32,
    pub(super) body: ObjectBody,
}

/// What is said of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ObjectBody {
    Pd,
    Channel(ChannelBody),
    Cq(CqBody),
    Srq(SrqBody),
    Mr(MrBody),
    Ah(AhBody),
    Qp(Box<QpBody>),
    Mw(MwBody),
}

/// Behind the fields there is nothing but the padding.
fn fields<T: DeserializeOwned>(body: &[u8]) -> Result<T, DumpError> {
    let (fields, padding) =
        postcard::take_from_bytes(body).map_err(|_| DumpError::Content("a field cannot be read"))?;
    match padding.len() < 4 && padding.iter().all(|byte| *byte == 0) {
        true => Ok(fields),
        false => Err(DumpError::Content("there is more than the fields")),
    }
}

impl Record {
    /// Which one: the number or key by which it was known, and will be.
    pub fn handle(&self) -> u32 {
        self.handle
    }

    /// What it describes.
    pub fn object(&self) -> ObjectType {
        match self.body {
            ObjectBody::Pd => ObjectType::Pd,
            ObjectBody::Channel(_) => ObjectType::Channel,
            ObjectBody::Cq(_) => ObjectType::Cq,
            ObjectBody::Srq(_) => ObjectType::Srq,
            ObjectBody::Mr(_) => ObjectType::Mr,
            ObjectBody::Ah(_) => ObjectType::Ah,
            ObjectBody::Qp(_) => ObjectType::Qp,
            ObjectBody::Mw(_) => ObjectType::Mw,
        }
    }

    /// Reads one record, which must be all of `bytes`.
    pub fn parse(bytes: &[u8]) -> Result<Self, DumpError> {
        let raw = format::parse_record(bytes)?;
        let body = match raw.object {
            ObjectType::Pd => fields::<()>(raw.body).map(|()| ObjectBody::Pd)?,
            ObjectType::Channel => ObjectBody::Channel(fields(raw.body)?),
            ObjectType::Cq => ObjectBody::Cq(fields(raw.body)?),
            ObjectType::Srq => ObjectBody::Srq(fields(raw.body)?),
            ObjectType::Mr => ObjectBody::Mr(fields(raw.body)?),
            ObjectType::Ah => ObjectBody::Ah(fields(raw.body)?),
            ObjectType::Qp => ObjectBody::Qp(fields(raw.body)?),
            ObjectType::Mw => ObjectBody::Mw(fields(raw.body)?),
        };
        Ok(Self {
            handle: raw.handle,
            body,
        })
    }

    /// The bytes that [`Record::parse`] reads.
    pub fn encode(&self) -> Result<Vec<u8>, DumpError> {
        fn plain(body: &impl Serialize) -> Vec<u8> {
            postcard::to_stdvec(body).expect("a vector takes everything")
        }
        let body = match &self.body {
            ObjectBody::Pd => Vec::new(),
            ObjectBody::Channel(body) => plain(body),
            ObjectBody::Cq(body) => plain(body),
            ObjectBody::Srq(body) => plain(body),
            ObjectBody::Mr(body) => plain(body),
            ObjectBody::Ah(body) => plain(body),
            ObjectBody::Qp(body) => plain(body),
            ObjectBody::Mw(body) => plain(body),
        };
        format::record(self.object(), self.handle, &body)
    }

    /// A record of any body, with a right checksum: for who tries what comes of it.
    pub fn forge(object: ObjectType, handle: u32, body: &[u8]) -> Result<Vec<u8>, DumpError> {
        format::record(object, handle, body)
    }
}

/// Reads a whole dump: all its records, or why it is none.
pub fn check(dump: &[u8]) -> Result<Vec<Record>, DumpError> {
    let records = format::parse(dump)?;
    records.into_iter().map(Record::parse).collect()
}
